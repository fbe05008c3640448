"""How the nodes of a step read as what a kernel computes, or why they do not."""
