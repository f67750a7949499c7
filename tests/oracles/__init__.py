"""What plain torch computes: the values that zeroamp is compared with. Imports nothing of zeroamp."""
