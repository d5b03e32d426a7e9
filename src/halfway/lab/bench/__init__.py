"""What one training step costs: measured in several ways side by side (`steps`), and tabulated (`table`)."""
