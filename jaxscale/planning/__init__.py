"""Which configuration to use on which chips: closed forms first, then the real compiler of the real chip."""
