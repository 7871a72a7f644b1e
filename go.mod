module github.com/opendsec/dsec

go 1.26.0

require (
	connectrpc.com/connect v1.21.1 // indirect
	github.com/google/go-containerregistry v0.22.1 // indirect
	github.com/klauspost/compress v1.20.4 // indirect
	gocloud.dev v0.49.0 // indirect
	golang.org/x/sys v0.50.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)
