"""What looks on while a model trains. Observers return their input unchanged."""
