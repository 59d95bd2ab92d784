"""One file a family: what stands between a stock pipeline and the core. Adapters know no algorithm and no reward."""
