"""Context, tensor and expert parallelism: the axes of a mesh, and what is checked and refused with them."""
