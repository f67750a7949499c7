"""Files that mean harm, and what reading each of them came to."""
