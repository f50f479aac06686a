"""Many configurations of one model on one cluster, kept in a store that outlives any interruption."""
