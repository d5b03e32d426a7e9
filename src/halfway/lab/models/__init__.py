"""Models for the lab: `by_name` builds torchvision's, timm's or the user's own, `small` has those of the recipes
(`speedrun` one of them)."""
