"""Methods that score each sample by itself."""
