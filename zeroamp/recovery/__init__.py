"""Going on after an exception on some ranks. Off by default."""
