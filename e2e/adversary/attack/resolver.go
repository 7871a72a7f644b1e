package main

import (
	"encoding/binary"
	"io"
	"net"
)

// answer is a server of names for a control: everything is at 192.0.2.7.
func answer(proto, addr string) (stop func(), err error) {
	if proto == "tcp" {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				serveOne(c)
			}
		}()
		return func() { _ = l.Close() }, nil
	}
	l, err := net.ListenPacket("udp", addr)
	if err != nil {
		return nil, err
	}
	go func() {
		b := make([]byte, 1500)
		for {
			n, from, err := l.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = l.WriteTo(reply(b[:n]), from)
		}
	}()
	return func() { _ = l.Close() }, nil
}

func serveOne(c net.Conn) {
	defer func() { _ = c.Close() }()
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return
	}
	q := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(c, q); err != nil {
		return
	}
	r := reply(q)
	_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(r))), r...))
}

// reply answers the one question of a message with an address.
func reply(q []byte) []byte {
	const head = 12
	end := head
	for end < len(q) && q[end] != 0 {
		end += int(q[end]) + 1
	}
	end += 5 // the root, type and class
	if end > len(q) {
		return nil
	}
	r := append([]byte{q[0], q[1], 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0}, q[head:end]...)
	return append(r, 0xc0, head, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7)
}
