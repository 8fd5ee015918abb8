// Command worker runs the commands of ../../README.md, a JSON object per line of stdin.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	redlatch "example.org/redlatch/lua/clients/go"
)

type command struct {
	Do, Client, URL, Topology, Prefix, Kind, Name, Owner, As, Key string
	TTL                                                           time.Duration  `json:"ttl_ms"`
	Limit                                                         *time.Duration `json:"limit_ms"`
	Seconds                                                       float64
	Resp                                                          int // 2 or 3; 0: what is usual
	Async                                                         bool
	ID                                                            any
}

type answer map[string]any

var (
	dbs     sync.Map // "client" -> redis.UniversalClient
	clients sync.Map // "client" -> *redlatch.Client
	leases  sync.Map // "as" -> *redlatch.Lease
	kinds   = map[string]redlatch.Kind{"mutex": redlatch.Mutex, "reentrant": redlatch.Reentrant,
		"read": redlatch.Read, "write": redlatch.Write}
	errUnknown  = errors.New("unknown")
	errTimedOut = errors.New("timed out")
	names       = map[error]string{errUnknown: "unknown", errTimedOut: "timed_out",
		redlatch.ErrBusy: "timed_out", redlatch.ErrInvalidLock: "invalid_name",
		redlatch.ErrWrongType: "wrong_type", redlatch.ErrTooDeep: "too_deep",
		redlatch.ErrMalformed: "malformed", redlatch.ErrLost: "lost",
		redlatch.ErrWouldDeadlock: "would_deadlock", redlatch.ErrTooManyReaders: "too_many_readers"}
	verbs = map[string]func(*redlatch.Lease, context.Context) error{
		"renew": (*redlatch.Lease).Renew, "downgrade": (*redlatch.Lease).Downgrade,
		"release": func(l *redlatch.Lease, _ context.Context) error { return l.Release() }}
)

func (c command) limit() time.Duration {
	if c.Limit == nil {
		return 5 * time.Second
	}
	return *c.Limit * time.Millisecond
}

func (c command) client() *redlatch.Client {
	found, _ := clients.Load(c.Client)
	return found.(*redlatch.Client) // it panics if there is none
}

func acquire(c command, limit time.Duration) (*redlatch.Lease, error) {
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(limit, 5*time.Second))
	defer cancel()
	lease, err := c.client().Acquire(ctx, redlatch.Lock{Kind: kinds[c.Kind], Name: c.Name,
		Owner: c.Owner, TTL: cmp.Or(c.TTL, 3000) * time.Millisecond, NoWait: limit == 0})
	if limit != 0 && errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", errTimedOut, err) // not a request without an answer
	}
	return lease, err
}

// count increments a number with a GET and a SET, which only the lock keeps together.
func (a answer) count(c command) (err error) {
	db, _ := dbs.Load(c.Client)
	increments, longest, token, isAscending := 0, int64(0), int64(0), true
	for began := time.Now(); err == nil && time.Since(began).Seconds() < c.Seconds; increments++ {
		requested, lease := time.Now(), (*redlatch.Lease)(nil)
		if lease, err = acquire(c, 10*time.Second); err != nil {
			break
		}
		longest = max(longest, time.Since(requested).Milliseconds())
		isAscending, token = isAscending && lease.Token > token, lease.Token
		value, failure := db.(redis.UniversalClient).Get(lease.Context(), c.Key).Int64()
		if failure == nil || failure == redis.Nil { // after any other failure, it would count from 0
			failure = db.(redis.UniversalClient).Set(lease.Context(), c.Key, value+1, 0).Err()
		}
		err = cmp.Or(failure, lease.Release())
	}
	a["increments"], a["longest_ms"], a["tokens_ascending"] = increments, longest, isAscending
	return err
}

func (a answer) run(c command) (err error) {
	found, _ := leases.Load(c.As)
	lease, _ := found.(*redlatch.Lease)
	switch c.Do {
	case "open":
		_, master, _ := strings.Cut(c.Topology, ":") // empty without Sentinel
		server, err := redis.ParseURL(c.URL)
		if err != nil {
			return err
		}
		db := redis.NewUniversalClient(&redis.UniversalOptions{
			MasterName: master, IsClusterMode: c.Topology == "cluster", Protocol: c.Resp,
			Addrs: []string{server.Addr}, Username: server.Username, Password: server.Password})
		var scripts fs.FS // as embedded, unless a folder is named
		if folder := os.Getenv("REDLATCH_LUA"); folder != "" {
			scripts = os.DirFS(folder)
		}
		client, err := redlatch.New(context.Background(), db, scripts, c.Prefix)
		if err == nil {
			dbs.Store(c.Client, db)
			clients.Store(c.Client, client)
		}
		return err
	case "close":
		err = c.client().Close()
	case "count":
		err = a.count(c)
	case "acquire":
		if lease, err = acquire(c, c.limit()); err == nil {
			a["token"] = lease.Token
			leases.Store(c.As, lease)
		}
	case "is_valid":
		a["valid"] = lease.IsValid()
	case "lost":
		ctx, cancel := context.WithTimeout(lease.Context(), c.limit())
		defer cancel()
		if <-ctx.Done(); context.Cause(ctx) != redlatch.ErrLost {
			err = errTimedOut
		}
	case "release", "renew", "downgrade":
		if err = verbs[c.Do](lease, context.Background()); err == nil || err == redlatch.ErrLost {
			a["held"], err = err == nil, nil
		}
	default:
		err = errUnknown
	}
	return err
}

// nameOf names an error: one of redlatch, no answer, or a reply.
func nameOf(err error) string {
	for each, name := range names {
		if errors.Is(err, each) {
			return name
		}
	}
	var network net.Error
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF) || errors.As(err, &network) {
		return "no_answer"
	}
	return "failed"
}

func main() {
	output := log.New(os.Stdout, "", 0)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		c := command{Prefix: "lock:"}
		json.Unmarshal(lines.Bytes(), &c) // a malformed line is an unknown command
		reply := func() {
			a, err := answer{}, errors.New("not open, or no such handle")
			defer func() {
				recover() // a nil client or lease: err is still the one above
				if a["ok"] = err == nil; err != nil {
					a["error"], a["text"] = nameOf(err), err.Error()
				}
				if c.ID != nil {
					a["id"] = c.ID
				}
				text, _ := json.Marshal(a)
				output.Println(string(text))
			}()
			err = a.run(c)
		}
		if c.Async {
			go reply()
		} else if reply(); c.Do == "close" && c.Client == "" {
			return
		}
	}
}
