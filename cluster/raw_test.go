package cluster_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"testing"
)

// rawGet asks a unix socket by hand and returns the status.
func rawGet(t *testing.T, socket, path, auth string) int {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: node\r\nAuthorization: %s\r\n\r\n", path, auth)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode
}
