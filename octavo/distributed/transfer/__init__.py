"""Transfer of KV blocks between engines: messages, transports and the worker half."""
