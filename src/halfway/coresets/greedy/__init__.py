"""Methods that choose samples jointly, class by class."""
