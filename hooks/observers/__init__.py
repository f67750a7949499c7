"""Observers of a training model: labels in traces, exposed communication, dtypes. They do not change tensors."""
