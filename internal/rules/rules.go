// Package rules holds the house rules of this repository that a program can
// check: package docs, import direction, sizes, error texts, forbidden calls.
// It reads source files only and is used by its own test.
package rules

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Module is the import path of this repository.
const Module = "github.com/opendsec/dsec"

// The hard stops on sizes.
const (
	maxFileLines     = 800
	maxFuncLines     = 100
	maxParams        = 5
	maxIfaceMethods  = 10
	dirNotOurs       = "^(\\.|bin$|sdk$|web$|node_modules$|testdata$)"
	generatedPattern = `(?m)^// Code generated .* DO NOT EDIT\.$`
)

var generated = regexp.MustCompile(generatedPattern)

// File is one parsed Go file of ours.
type File struct {
	Path string // relative to the root, with slashes
	Dir  string // its folder, "." for the root
	AST  *ast.File
	Set  *token.FileSet
	Test bool
}

// Load parses every hand-written Go file below root.
func Load(root string) ([]File, error) {
	skip := regexp.MustCompile(dirNotOurs)
	var files []File
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if path != root && skip.MatchString(d.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		if isGenerated(f) {
			return nil
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		files = append(files, File{Path: rel, Dir: filepath.ToSlash(filepath.Dir(rel)), AST: f, Set: set,
			Test: strings.HasSuffix(rel, "_test.go")})
		return nil
	})
	return files, err
}

func isGenerated(f *ast.File) bool {
	for _, g := range f.Comments {
		if g.Pos() > f.Package {
			break
		}
		for _, c := range g.List {
			if generated.MatchString(c.Text) {
				return true
			}
		}
	}
	return false
}

// PackageDocs wants exactly one package comment in each package.
func PackageDocs(files []File) (broken []string) {
	docs := map[string]int{}
	for _, f := range files {
		if f.Test {
			continue
		}
		if _, ok := docs[f.Dir]; !ok {
			docs[f.Dir] = 0
		}
		if f.AST.Doc != nil {
			docs[f.Dir]++
		}
	}
	for dir, n := range docs {
		if n != 1 {
			broken = append(broken, fmt.Sprintf("%s: %d package comments, want 1", dir, n))
		}
	}
	return broken
}

// Sizes checks files, functions, parameter lists and interfaces.
func Sizes(files []File) (broken []string) {
	for _, f := range files {
		if n := f.Set.Position(f.AST.End()).Line; n > maxFileLines {
			broken = append(broken, fmt.Sprintf("%s: %d lines, at most %d", f.Path, n, maxFileLines))
		}
		ast.Inspect(f.AST, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				broken = append(broken, funcSize(f, n)...)
			case *ast.InterfaceType:
				if m := methods(n); m > maxIfaceMethods {
					broken = append(broken, fmt.Sprintf("%s: interface of %d methods, at most %d", f.pos(n), m, maxIfaceMethods))
				}
			}
			return true
		})
	}
	return broken
}

func (f File) pos(n ast.Node) string {
	return f.Path + ":" + strconv.Itoa(f.Set.Position(n.Pos()).Line)
}

func funcSize(f File, d *ast.FuncDecl) (broken []string) {
	lines := f.Set.Position(d.End()).Line - f.Set.Position(d.Pos()).Line + 1
	if lines > maxFuncLines {
		broken = append(broken, fmt.Sprintf("%s: func %s has %d lines, at most %d", f.pos(d), d.Name.Name, lines, maxFuncLines))
	}
	params := 0
	for _, p := range d.Type.Params.List {
		params += max(1, len(p.Names))
	}
	if params > maxParams+1 || (params > maxParams && !firstIsContext(d)) {
		broken = append(broken, fmt.Sprintf("%s: func %s has %d parameters, at most %d and a context", f.pos(d), d.Name.Name, params, maxParams))
	}
	return broken
}

func firstIsContext(d *ast.FuncDecl) bool {
	sel, ok := d.Type.Params.List[0].Type.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == "Context"
}

func methods(i *ast.InterfaceType) (n int) {
	for _, m := range i.Methods.List {
		if _, ok := m.Type.(*ast.FuncType); ok {
			n += max(1, len(m.Names))
		}
	}
	return n
}

var weakText = regexp.MustCompile(`^(failed to|unable to|could not|cannot |error )`)

// Texts forbids error texts that say nothing: an error is operation, object, cause.
func Texts(files []File) (broken []string) {
	for _, f := range files {
		if f.Test {
			continue
		}
		ast.Inspect(f.AST, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || (sel.Sel.Name != "Errorf" && sel.Sel.Name != "New") {
				return true
			}
			for _, a := range call.Args {
				lit, ok := a.(*ast.BasicLit)
				if ok && lit.Kind == token.STRING {
					if s, err := strconv.Unquote(lit.Value); err == nil && weakText.MatchString(s) {
						broken = append(broken, fmt.Sprintf("%s: error text %q", f.pos(call), s))
					}
				}
			}
			return true
		})
	}
	return broken
}

// NoInit forbids init functions and blank imports outside of tests: boot order is a list in cmd.
func NoInit(files []File) (broken []string) {
	for _, f := range files {
		if f.Test {
			continue
		}
		for _, d := range f.AST.Decls {
			if fd, ok := d.(*ast.FuncDecl); ok && fd.Recv == nil && fd.Name.Name == "init" {
				broken = append(broken, f.pos(fd)+": init function")
			}
		}
		for _, im := range f.AST.Imports {
			if im.Name != nil && im.Name.Name == "_" && im.Path.Value != `"embed"` {
				broken = append(broken, fmt.Sprintf("%s: blank import of %s", f.pos(im), im.Path.Value))
			}
		}
	}
	return broken
}
