"""Plain data: stages, schedules, costs, programs, plans, timelines, results. Computes nothing."""
