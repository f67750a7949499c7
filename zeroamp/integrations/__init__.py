"""What other libraries need from a wrapped model. A module here imports its library when it is used."""
