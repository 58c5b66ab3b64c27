"""What the planner shows: JSON, tables, the page and its data, the drawing."""
