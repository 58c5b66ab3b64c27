"""The planner's forms: JSON, tables, what-if data, the page, the drawing."""
