"""Models for the lab: `by_name` builds any of torchvision's, timm's or the user's own, `small` holds the recipes'."""
