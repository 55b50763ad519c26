"""What a run would need and take on chips that are not here: hardware, wires, closed forms of time."""
