"""`octavo cluster`: starts and monitors instances on several machines through Ray."""
