"""What everything stands on: errors, checks of what a user wrote, layouts, heads, regions. Standard library only."""
