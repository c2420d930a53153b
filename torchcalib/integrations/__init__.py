"""Ways into what people train with. Each room needs its framework, and is loaded only when it is asked for."""
