"""The command `zeroamp`."""
