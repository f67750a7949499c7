"""All uses of private torch names, and of names that differ between torch versions. Other packages import neither."""
