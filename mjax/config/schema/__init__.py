"""The keys that one may set, a file a group."""
