"""Every private name of torch, and every name that differs by version. Nothing else imports one."""
