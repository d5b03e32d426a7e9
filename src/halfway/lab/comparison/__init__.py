"""Methods side by side: which runs that needs (`trials`), training and timing them (`run`), the numbers (`table`)."""
