"""What of the server is SGLang's: flags, routes, how a client's leaving is noticed, health (SGLang reference §5, §7)."""
