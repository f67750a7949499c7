"""Observers of a training model: ranges in traces, exposed communication, dtypes. They do not change tensors."""
