"""What real peers (routers, gateways, clients) do with our servers: `make compat` runs them and writes docs/compat."""
