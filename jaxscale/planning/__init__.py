"""What a configuration needs and how fast it is, before anything compiles."""
