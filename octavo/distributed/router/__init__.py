"""`octavo route`: a router in front of several servers."""
