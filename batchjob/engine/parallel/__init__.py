"""One model over several GPUs: a leader, its followers and the group of their collectives."""
