"""halfway: Partial Forward Blocking for PyTorch. Samples leave the batch halfway through the forward pass."""
