"""Numbers become schedules; schedules become other schedules; schedules are checked."""
