module github.com/opendsec/dsec

go 1.26
