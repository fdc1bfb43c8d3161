"""`octavo cluster`: instances on several machines, started and watched through Ray."""
