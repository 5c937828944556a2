"""`--plan auto`: pass times, acceptance, group sizes, and the choice of the fastest plan."""
