"""What selectors share: drawing without replacement, losses per sample, last-layer gradients. No selector here."""
