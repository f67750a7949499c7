"""Sets the precision in which modules run: autocast, fp32 regions, casts of inputs."""
