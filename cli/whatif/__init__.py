"""`batchdecode compare` and `batchdecode plan`, from requests to tables."""
