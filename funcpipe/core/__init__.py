"""Plain data: trees, stages, schedules, plans, results, errors."""
