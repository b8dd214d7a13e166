"""Studies: what every study shares, and the loop that runs them."""
