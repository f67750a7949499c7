"""In which precision modules run: autocast, fp32 regions, shared casts."""
