"""What lies where, in bytes, and what the compiled step sends over which mesh axis."""
