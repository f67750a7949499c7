"""`sensitivity`: measures what computing modules in low precision costs. It changes nothing and trains nothing."""
