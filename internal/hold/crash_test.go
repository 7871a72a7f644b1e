package hold

const crashRole = "crash-client"

func crashClient([]string) {}
