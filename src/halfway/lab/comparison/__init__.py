"""Methods side by side: which runs are needed (`trials`), training and timing them (`run`), the numbers (`table`)."""
