"""The schedule laboratory: schedules that are found rather than written down."""
