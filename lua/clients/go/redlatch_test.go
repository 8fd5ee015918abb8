package redlatch

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/redis/go-redis/v9"
)

var (
	ctx    = context.Background()
	folder = os.DirFS("../..")
	binary = "redis-server"
	addr   string // a server that most tests share, one after the other
)

func TestMain(m *testing.M) {
	if path := os.Getenv("REDLATCH_SERVER"); path != "" {
		binary = path
	}
	redis.SetLogger(silence{})
	dir, _ := os.MkdirTemp("", "redlatch")
	shared, stop, err := startServer(dir)
	if err != nil {
		fmt.Println("no server to test with:", err)
		os.Exit(1)
	}
	addr = shared
	code := m.Run()
	stop()
	os.RemoveAll(dir)
	os.Exit(code)
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// freePort returns a port that is free, and free plus 10000 for the bus of a cluster.
func freePort() int {
	for {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		port := listener.Addr().(*net.TCPAddr).Port
		bus, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port+10000))
		listener.Close()
		if err == nil {
			bus.Close()
			return port
		}
	}
}

func startServer(dir string, args ...string) (string, func(), error) {
	port := freePort()
	server := exec.Command(binary, append(args, "--port", fmt.Sprint(port), "--bind", "127.0.0.1",
		"--dir", dir, "--save", "", "--logfile", filepath.Join(dir, fmt.Sprint(port, ".log")))...)
	if err := server.Start(); err != nil {
		return "", nil, err
	}
	address := fmt.Sprint("127.0.0.1:", port)
	db := redis.NewClient(&redis.Options{Addr: address})
	defer db.Close()
	var err error
	for range 800 {
		if err = db.Ping(ctx).Err(); err == nil {
			break
		}
		time.Sleep(25 * time.Millisecond)
	}
	return address, func() { server.Process.Kill(); server.Wait() }, err
}

func ownServer(t *testing.T, args ...string) string {
	t.Helper()
	address, stop, err := startServer(t.TempDir(), args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return address
}

// plain is the oracle: a client of the server without locks.
func plain(t *testing.T) *redis.Client {
	db := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { db.Close() })
	return db
}

// fresh empties the shared server, and checks after the test that nothing is left on it.
func fresh(t *testing.T) *redis.Client {
	db := plain(t)
	db.FlushAll(ctx)
	t.Cleanup(func() { nothingLeft(t, plain(t)) })
	return db
}

func nothingLeft(t *testing.T, db redis.UniversalClient) {
	t.Helper()
	keys, _ := db.Keys(ctx, "*").Result()
	for _, key := range keys {
		if strings.HasSuffix(key, ":waiters") {
			if n := waiting(db, key); n != 0 {
				t.Errorf("%s: %d waiters are left", key, n)
			}
		} else if !strings.HasSuffix(key, ":fence") && strings.Contains(key, "lock:") {
			t.Errorf("lock %s is left", key)
		}
	}
}

func waiting(db redis.UniversalClient, key string) int64 {
	return db.ZCount(ctx, key, "-inf", "(4503599627370496").Val()
}

func open(t *testing.T, db redis.UniversalClient) *Client {
	t.Helper()
	client, err := New(ctx, db, folder, "lock:")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// client has connections of its own, as a process would, and is subscribed.
func client(t *testing.T) *Client {
	c := open(t, plain(t))
	eventually(t, "the client is subscribed", c.isSubscribed.Load)
	return c
}

// A script that is missing fails here, not in the first call that needs it.
func TestNewNeedsAllScripts(t *testing.T) {
	scripts := fstest.MapFS{}
	for _, name := range []string{"mutex", "reentrant", "rwlock", "fenced"} {
		scripts[name+".lua"] = &fstest.MapFile{Data: []byte("return 1")}
	}
	_, err := New(context.Background(), plain(t), scripts, "lock:")
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "node.lua") {
		t.Fatal(err)
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 30 s: ", what)
		}
	}
}

func wants(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got %v, not %v", err, want)
	}
}

func mutex(ttl time.Duration) Lock { return Lock{Kind: Mutex, Name: "x", TTL: ttl} }

func try(lock Lock) Lock { lock.NoWait = true; return lock }

// acquireLater waits for the lock in the background, and returns when the waiter is queued.
func acquireLater(t *testing.T, db redis.UniversalClient, c *Client, lock Lock) <-chan *Lease {
	t.Helper()
	granted, queue := make(chan *Lease, 1), "{lock:"+lock.Name+"}:waiters"
	before := waiting(db, queue)
	go func() {
		lease, err := c.Acquire(ctx, lock)
		if err != nil {
			t.Error(err)
		}
		granted <- lease
	}()
	eventually(t, "the waiter is queued", func() bool { return waiting(db, queue) > before })
	return granted
}

// grants counts grants to waiters, and those that came as late as a poll, after half a claim.
type grants struct{ all, late int }

func (g *grants) add(took time.Duration) {
	g.all++
	if took > time.Second { // of 1.5 s: less may have passed since the last poll
		g.late++
	}
}

// wantsNoPolls allows a few late ones: a busy machine delays some, polls delay each of a client.
func (g *grants) wantsNoPolls(t *testing.T) {
	t.Helper()
	if g.late > g.all/4 {
		t.Errorf("%d of %d took over 1 s: the waiters polled every 1.5 s", g.late, g.all)
	}
}

// handOver checks that the waiters of n grants do not poll.
func handOver(t *testing.T, db redis.UniversalClient, n int, clients ...*Client) {
	t.Helper()
	lock := mutex(20 * time.Second)
	lease := must(clients[0].Acquire(ctx, lock))
	var all grants
	for i := range n {
		granted := acquireLater(t, db, clients[(i+1)%len(clients)], lock)
		began := time.Now()
		wants(t, lease.Release(), nil)
		lease = <-granted
		all.add(time.Since(began))
	}
	wants(t, lease.Release(), nil)
	all.wantsNoPolls(t)
}

// A plain store would undo the answer of another goroutine, which has come between the two steps.
func TestMinTokenNeverFallsBesideAnotherAnswer(t *testing.T) {
	c := &Client{}
	var answers sync.WaitGroup
	for range 4 {
		answers.Go(func() {
			for i := range int64(300_000) {
				before := c.offset.Load()
				c.observe(micros() + 10*i)
				if now := c.offset.Load(); now < before {
					t.Errorf("%d after %d", now, before)
					return
				}
			}
		})
	}
	answers.Wait()
}

// pause lets scripts wait until the function that it returns is called, or the test ends.
func pause(t *testing.T, db *redis.Client) (resume func()) {
	must(db.Do(ctx, "CLIENT", "PAUSE", 20_000, "WRITE").Result())
	resume = func() { db.ClientUnpause(ctx) }
	t.Cleanup(resume)
	return resume
}

func TestMutexExcludesAndTokensGrow(t *testing.T) {
	db := fresh(t)
	var workers sync.WaitGroup
	for range 4 {
		c := client(t)
		for range 3 {
			workers.Go(func() {
				for range 25 {
					lease := must(c.Acquire(ctx, mutex(20*time.Second)))
					value, _ := db.Get(ctx, "counter").Int64()
					db.RPush(ctx, "tokens", lease.Token)
					db.Set(ctx, "counter", value+1, 0)
					wants(t, lease.Release(), nil)
				}
			})
		}
	}
	workers.Wait()
	if value := db.Get(ctx, "counter").Val(); value != "300" {
		t.Errorf("counter %s, not 300", value)
	}
	last := ""
	for _, token := range db.LRange(ctx, "tokens", 0, -1).Val() {
		if token <= last { // of equal length
			t.Fatalf("token %s after %s", token, last)
		}
		last = token
	}
}

func TestTryAcquireFailsWhileHeld(t *testing.T) {
	fresh(t)
	a, b := client(t), client(t)
	lease := must(a.Acquire(ctx, mutex(20*time.Second)))
	_, err := b.Acquire(ctx, try(mutex(20*time.Second)))
	wants(t, err, ErrBusy)
	wants(t, lease.Release(), nil)
	wants(t, must(b.Acquire(ctx, try(mutex(20*time.Second)))).Release(), nil)
}

func TestReentrantHoldsOfOneOwnerNest(t *testing.T) {
	db, c := fresh(t), client(t)
	lock := Lock{Kind: Reentrant, Name: "x", Owner: "o1", TTL: 20 * time.Second}
	other := lock
	other.Owner = "o2"
	outer, inner := must(c.Acquire(ctx, lock)), must(c.Acquire(ctx, lock))
	if outer.Token != inner.Token {
		t.Errorf("tokens %d and %d differ", outer.Token, inner.Token)
	}
	wants(t, inner.Release(), nil)
	_, err := c.Acquire(ctx, try(other))
	wants(t, err, ErrBusy)
	granted := acquireLater(t, db, c, other)
	wants(t, outer.Release(), nil)
	wants(t, (<-granted).Release(), nil)
	var leases []*Lease
	for range 255 {
		leases = append(leases, must(c.Acquire(ctx, try(lock))))
	}
	_, err = c.Acquire(ctx, try(lock))
	wants(t, err, ErrTooDeep)
	for _, lease := range leases {
		wants(t, lease.Release(), nil)
	}
}

func rwlock(kind Kind, owner string) Lock {
	return Lock{Kind: kind, Name: "x", Owner: owner, TTL: 20 * time.Second}
}

func TestReadersShareAndWriterExcludes(t *testing.T) {
	db, a, b := fresh(t), client(t), client(t)
	one, two := must(a.Acquire(ctx, rwlock(Read, ""))), must(b.Acquire(ctx, rwlock(Read, "")))
	_, err := a.Acquire(ctx, try(rwlock(Write, "")))
	wants(t, err, ErrBusy)
	granted := acquireLater(t, db, a, rwlock(Write, ""))
	_, err = b.Acquire(ctx, try(rwlock(Read, ""))) // a writer waits
	wants(t, err, ErrBusy)
	wants(t, one.Release(), nil)
	wants(t, two.Release(), nil)
	writer := <-granted
	_, err = b.Acquire(ctx, try(rwlock(Read, "")))
	wants(t, err, ErrBusy)
	wants(t, writer.Release(), nil)
}

func TestSecondUpgradeWouldDeadlock(t *testing.T) {
	db, a, b := fresh(t), client(t), client(t)
	one, two := must(a.Acquire(ctx, rwlock(Read, "o1"))), must(b.Acquire(ctx, rwlock(Read, "o2")))
	granted := acquireLater(t, db, a, rwlock(Write, "o1"))
	_, err := b.Acquire(ctx, rwlock(Write, "o2"))
	wants(t, err, ErrWouldDeadlock)
	wants(t, two.Release(), nil)
	wants(t, (<-granted).Release(), nil)
	wants(t, one.Release(), nil)
}

func TestDowngradeAdmitsReadersAndKeepsToken(t *testing.T) {
	db, a, b := fresh(t), client(t), client(t)
	writer := must(a.Acquire(ctx, rwlock(Write, "")))
	granted := acquireLater(t, db, b, rwlock(Read, ""))
	wants(t, writer.Downgrade(ctx), nil)
	reader := <-granted
	if reader.Token < writer.Token || !writer.IsValid() {
		t.Errorf("token %d after %d, valid: %v", reader.Token, writer.Token, writer.IsValid())
	}
	_, err := b.Acquire(ctx, try(rwlock(Write, "")))
	wants(t, err, ErrBusy)
	wants(t, reader.Downgrade(ctx), ErrWrongType)
	wants(t, writer.Release(), nil)
	wants(t, reader.Release(), nil)
}

func TestWaitersAreNotified(t *testing.T) {
	db := fresh(t)
	handOver(t, db, 20, client(t), client(t))
}

// Ring.Subscribe panics if no shard is up. And it subscribes at one shard, while the scripts of the
// others publish, find no subscriber, and drop the waiter as dead.
func TestRingIsPolledWithoutSubscription(t *testing.T) {
	address, stop, err := startServer(t.TempDir())
	wants(t, err, nil)
	defer stop()
	db := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": address},
		HeartbeatFrequency: 20 * time.Millisecond})
	defer db.Close()
	c := open(t, db)
	lease := must(c.Acquire(ctx, mutex(20*time.Second)))
	shard := redis.NewClient(&redis.Options{Addr: address})
	defer shard.Close()
	granted := acquireLater(t, shard, c, mutex(20*time.Second))
	if channels := db.PubSubChannels(ctx, "*").Val(); len(channels) != 0 {
		t.Errorf("subscribed to %v", channels)
	}
	wants(t, lease.Release(), nil)
	wants(t, (<-granted).Release(), nil)
	handOver(t, shard, 5, c) // a poll every 100 ms is not late
	stop()
	eventually(t, "the shard is down", func() bool { return db.Len() == 0 })
	time.Sleep(500 * time.Millisecond) // a subscription would be tried again
}

// hook runs before each command of a client.
type hook func(redis.Cmder)

func (h hook) DialHook(next redis.DialHook) redis.DialHook                               { return next }
func (h hook) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook { return n }
func (h hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, command redis.Cmder) error {
		h(command)
		return next(ctx, command)
	}
}

// A poll may find a grant before its message is read: then the message comes during the release.
// A message that a failover's grant has sent must not be missed in that time.
func TestMessageDuringReleaseIsDealtWithAfterIt(t *testing.T) {
	db, user := fresh(t), plain(t)
	c := open(t, user)
	lease := must(c.Acquire(ctx, mutex(20*time.Second)))
	granted := acquireLater(t, db, c, mutex(20*time.Second))
	wants(t, lease.Release(), nil)
	lease = <-granted // it was queued, so messages may name it
	var releases atomic.Int64
	eventually(t, "the client is subscribed", c.isSubscribed.Load)
	user.AddHook(hook(func(command redis.Cmder) {
		isRelease := slices.Contains(command.Args(), any("release"))
		if isRelease && releases.Add(1) == 1 { // before it is sent
			db.Publish(ctx, c.channel, fmt.Sprint(lease.attempt, " 1 1 lock:x"))
			time.Sleep(200 * time.Millisecond) // a second release would be served now
			if n := releases.Load(); n != 1 {
				t.Errorf("%d releases at once", n)
			}
		}
	}))
	wants(t, lease.Release(), nil)
	eventually(t, "a release for the message", func() bool { return releases.Load() >= 2 })
}

// With a scan, a message takes longer for each attempt that ended within a minute: a client of 100
// leases per second becomes slower until it does nothing else.
func TestMessageTakesAsLongWithManyAttempts(t *testing.T) {
	db, c := fresh(t), client(t)
	woken := make(chan bool, 1)
	c.waiters.Store("probe", context.CancelFunc(func() { woken <- true }))
	fastest := func() time.Duration { // of 50: a busy machine stops this process for milliseconds
		took := time.Hour
		for range 50 {
			began := time.Now()
			db.Publish(ctx, c.channel, "probe 1 1 lock:x")
			<-woken
			took = min(took, time.Since(began))
		}
		return took
	}
	few := fastest()
	for range 50_000 {
		c.ended.Store(rand.Text(), &Lease{})
	}
	if many := fastest(); many > 10*few {
		t.Errorf("a message takes %v, and %v with 50,000 attempts that have ended", few, many)
	}
}

func TestWaitersAreNotifiedAgainAfterConnectionsWereKilled(t *testing.T) {
	db, a, b := fresh(t), client(t), client(t)
	for range 2 {
		db.ClientKillByFilter(ctx, "TYPE", "normal", "SKIPME", "yes")
		db.ClientKillByFilter(ctx, "TYPE", "pubsub")
		eventually(t, "both clients are subscribed again", func() bool {
			counts := db.PubSubNumSub(ctx, a.channel, b.channel).Val()
			return counts[a.channel] == 1 && counts[b.channel] == 1
		})
		handOver(t, db, 10, a, b)
	}
}

func TestNewSubscriptionWakesWaiters(t *testing.T) {
	db, a := fresh(t), client(t)
	lease := must(a.Acquire(ctx, mutex(20*time.Second)))
	granted := acquireLater(t, db, a, mutex(20*time.Second))
	var polls grants
	for range 4 {
		calls, began := scriptCalls(db), time.Now()
		db.ClientKillByFilter(ctx, "TYPE", "pubsub")
		eventually(t, "the waiter polls", func() bool { return scriptCalls(db) > calls })
		polls.add(time.Since(began))
	}
	polls.wantsNoPolls(t) // that is, none at its usual time
	// The end of the old one wakes as well. An answer that is on its way meanwhile may miss that.
	var isWoken atomic.Bool
	a.waiters.Store("probe", context.CancelFunc(func() {
		if a.isSubscribed.Load() {
			isWoken.Store(true)
		}
	}))
	db.ClientKillByFilter(ctx, "TYPE", "pubsub")
	eventually(t, "the confirmation wakes", isWoken.Load)
	wants(t, lease.Release(), nil)
	wants(t, (<-granted).Release(), nil)
}

// A new subscription wakes them as well: here, none is possible.
func TestEndOfTheSubscriptionWakesWaiters(t *testing.T) {
	db := redis.NewClient(&redis.Options{Addr: ownServer(t)})
	defer db.Close()
	db.Do(ctx, "ACL", "SETUSER", "listener", "on", ">secret", "~*", "&*", "+@all")
	user := redis.NewClient(&redis.Options{Addr: db.Options().Addr, Username: "listener", Password: "secret"})
	defer user.Close()
	c := open(t, user)
	eventually(t, "the client is subscribed", c.isSubscribed.Load)
	woken, wake := context.WithCancel(ctx)
	c.waiters.Store("probe", context.CancelFunc(func() {
		if !c.isSubscribed.Load() { // not for the confirmation
			wake()
		}
	}))
	wants(t, db.Do(ctx, "ACL", "SETUSER", "listener", "resetchannels").Err(), nil) // closes it
	eventually(t, "the waiter is woken", func() bool { return woken.Err() != nil })
}

func scriptCalls(db *redis.Client) int {
	found := regexp.MustCompile(`cmdstat_evalsha:calls=(\d+)`).FindStringSubmatch(
		db.Info(ctx, "commandstats").Val())
	calls, _ := strconv.Atoi(append(found, "", "0")[1])
	return calls
}

func TestRenewalKeepsLockBeyondItsTTL(t *testing.T) {
	t.Parallel()
	db := redis.NewClient(&redis.Options{Addr: ownServer(t)})
	defer db.Close()
	c := open(t, db)
	lease := must(c.Acquire(ctx, mutex(6*time.Second)))
	began := time.Now()
	for ; time.Since(began) < 9*time.Second; time.Sleep(5 * time.Millisecond) {
		if value := db.Get(ctx, "lock:x").Val(); value != lease.attempt || !lease.IsValid() {
			t.Fatalf("the lock has %q after %v", value, time.Since(began))
		}
	}
	wants(t, lease.Renew(ctx), nil) // so that none is under way at the release
	wants(t, lease.Release(), nil)
	calls := scriptCalls(db)
	time.Sleep(3 * time.Second) // half a TTL: a renewal would come after a third
	if n := scriptCalls(db) - calls; n != 0 {
		t.Errorf("%d requests after the release", n)
	}
	wants(t, lease.Renew(ctx), ErrLost)
}

func TestLossIsReportedAfterForce(t *testing.T) {
	db, c := fresh(t), client(t)
	lease := must(c.Acquire(ctx, mutex(600*time.Millisecond)))
	words := []any{"release", "operator", "", "", "", "", "", "", "", 1} // force
	must(c.scripts["mutex"].Run(ctx, db, lease.keys, words...).Result())
	next := must(c.Acquire(ctx, try(mutex(20*time.Second))))
	<-lease.Context().Done()
	wants(t, context.Cause(lease.Context()), ErrLost)
	wants(t, lease.Release(), ErrLost)
	if lease.IsValid() || db.Get(ctx, "lock:x").Val() != next.attempt {
		t.Error("the lost lease is valid, or its client changed the lock of the next holder")
	}
	wants(t, next.Release(), nil)
}

func TestRenewalsOfALostLeaseSendNothing(t *testing.T) {
	db, c := fresh(t), client(t)
	lease := must(c.Acquire(ctx, mutex(20*time.Second)))
	db.Del(ctx, "lock:x")
	wants(t, lease.Renew(ctx), ErrLost)
	c.background.Wait() // it is given up
	calls := scriptCalls(db)
	for range 3 {
		wants(t, lease.Renew(ctx), ErrLost)
	}
	c.background.Wait()
	if n := scriptCalls(db) - calls; n != 0 {
		t.Errorf("%d requests", n)
	}
}

// A group that grows while Wait returns panics: "WaitGroup is reused before previous Wait has
// returned".
func TestLossBesideClose(t *testing.T) {
	db := redis.NewClient(&redis.Options{Addr: addr})
	db.Close() // so that a release fails at once
	for range 2000 {
		c := &Client{db: db, scripts: map[string]*redis.Script{"mutex": redis.NewScript("")}}
		c.closing, c.stop = context.WithCancel(ctx)
		var losses sync.WaitGroup
		c.begin()
		for range 8 {
			l := &Lease{Lock: mutex(time.Second), c: c, keys: []string{"x", "y", "z"}}
			l.ctx, l.cancel = context.WithCancelCause(ctx)
			l.sent.Store(&time.Time{}) // its deadline has passed
			losses.Go(func() { wants(t, l.Renew(ctx), ErrLost) })
		}
		losses.Go(c.background.Done)
		c.Close()
		losses.Wait()
	}
}

// Timers stop during suspension, so that one for a third of the TTL would fire long after it.
func TestLossIsReportedSoonAfterSuspension(t *testing.T) {
	_, c := fresh(t), client(t)
	lease := must(c.Acquire(ctx, mutex(30*time.Second)))
	time.Sleep(50 * time.Millisecond) // it waits for the first renewal
	before := time.Now().Add(-31 * time.Second)
	lease.sent.Store(&before) // as if the machine had been suspended for 31 s
	began := time.Now()
	<-lease.Context().Done()
	if took := time.Since(began); took > 5*time.Second { // the next renewal is due after 10 s
		t.Errorf("the loss was reported after %v", took)
	}
	wants(t, context.Cause(lease.Context()), ErrLost)
	c.background.Wait()
}

func TestLateReleaseReportsLoss(t *testing.T) {
	db, c := fresh(t), client(t)
	lease := must(c.Acquire(ctx, mutex(20*time.Second)))
	db.Del(ctx, "lock:x")
	wants(t, lease.Release(), ErrLost)
}

func TestTimeoutAndCancellationLeaveNoWaiter(t *testing.T) {
	db, a, b := fresh(t), client(t), client(t)
	lease := must(a.Acquire(ctx, mutex(20*time.Second)))
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err := b.Acquire(short, mutex(20*time.Second))
	wants(t, err, context.DeadlineExceeded)
	cancelled, cancel := context.WithCancel(ctx)
	failed := make(chan error, 1)
	go func() { _, err := b.Acquire(cancelled, mutex(20*time.Second)); failed <- err }()
	eventually(t, "the waiter is queued", func() bool { return waiting(db, lease.keys[1]) == 1 })
	cancel()
	wants(t, <-failed, context.Canceled)
	eventually(t, "the waiter has left the queue", func() bool { return waiting(db, lease.keys[1]) == 0 })
	wants(t, lease.Release(), nil)
}

// patient has a client at the address that waits for each reply for 20 s.
func patient(t *testing.T, address string) *redis.Client {
	db := redis.NewClient(&redis.Options{Addr: address, ReadTimeout: 20 * time.Second})
	t.Cleanup(func() { db.Close() })
	return db
}

func TestTimeLimitHoldsWhileServerIsSilent(t *testing.T) {
	db := fresh(t)
	c := open(t, patient(t, addr))
	resume := pause(t, db)
	limited, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := c.Acquire(limited, mutex(20*time.Second))
	wants(t, err, context.DeadlineExceeded)
	if took := time.Since(began); took > 4*time.Second { // the limit of a request is 5 s
		t.Errorf("a limit of 200 ms took %v", took)
	}
	resume()
	c.background.Wait() // the late grant is given up
	if db.Exists(ctx, "lock:x").Val() != 0 {
		t.Error("the lock is held by an attempt that has ended")
	}
}

func TestNewReturnsAtTheEndOfItsContext(t *testing.T) {
	silent := must(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	limited, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := New(limited, patient(t, silent.Addr().String()), folder, "lock:")
	wants(t, err, context.DeadlineExceeded)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("a limit of 200 ms took %v", took)
	}
}

func TestCloseEndsWaitersAndRefusesNewOnes(t *testing.T) {
	db, a, b := fresh(t), client(t), client(t)
	lease := must(a.Acquire(ctx, mutex(20*time.Second)))
	failed := make(chan error, 1)
	go func() { _, err := b.Acquire(ctx, mutex(20*time.Second)); failed <- err }()
	eventually(t, "the waiter is queued", func() bool { return waiting(db, lease.keys[1]) == 1 })
	wants(t, b.Close(), nil)
	if n := waiting(db, lease.keys[1]); n != 0 {
		t.Error("the waiter is still in the queue after Close")
	}
	wants(t, <-failed, ErrClosed)
	calls := scriptCalls(db)
	_, err := b.Acquire(ctx, Lock{Kind: Mutex, Name: "y"})
	wants(t, err, ErrClosed)
	if n := scriptCalls(db) - calls; n != 0 {
		t.Errorf("%d requests of a closed client", n)
	}
	wants(t, lease.Release(), nil)
	wants(t, b.Close(), nil)
}

func TestEndedContextSendsNothing(t *testing.T) {
	db, c := fresh(t), client(t)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	calls := scriptCalls(db)
	for _, lock := range []Lock{mutex(20 * time.Second), try(mutex(20 * time.Second))} {
		_, err := c.Acquire(ended, lock)
		wants(t, err, context.Canceled)
	}
	c.background.Wait() // as Close, for a TTL if the server is silent
	if n := scriptCalls(db) - calls; n != 0 {
		t.Errorf("%d requests", n)
	}
}

func TestCloseEndsATry(t *testing.T) {
	db, c := fresh(t), client(t)
	resume := pause(t, db)
	time.AfterFunc(200*time.Millisecond, func() { c.Close() })
	_, err := c.Acquire(ctx, try(mutex(20*time.Second)))
	wants(t, err, ErrClosed)
	resume()
	c.Close()
}

func TestSecondReleaseSucceedsIfTheFirstOneDid(t *testing.T) {
	db, c := fresh(t), client(t)
	lease := must(c.Acquire(ctx, mutex(20*time.Second)))
	wants(t, lease.Release(), nil)
	db.Del(ctx, lease.keys[1]) // the mark of the release, which is kept for a minute
	wants(t, lease.Release(), nil)
	lost := must(c.Acquire(ctx, mutex(20*time.Second)))
	db.Del(ctx, "lock:x")
	wants(t, lost.Release(), ErrLost)
	wants(t, lost.Release(), ErrLost)
}

func TestTimeoutNamesTheLastFailure(t *testing.T) {
	t.Parallel()
	address, stop, err := startServer(t.TempDir())
	wants(t, err, nil)
	c := open(t, redis.NewClient(&redis.Options{Addr: address}))
	stop()
	limited, cancel := context.WithTimeout(ctx, 4*time.Second)
	defer cancel()
	_, err = c.Acquire(limited, mutex(20*time.Second)) // no request meets its own limit before
	wants(t, err, context.DeadlineExceeded)
	if !strings.Contains(fmt.Sprint(err), "connection refused") {
		t.Errorf("%v: does not say that the server is down", err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	time.AfterFunc(time.Second, cancel)
	_, err = c.Acquire(cancelled, mutex(time.Second))
	wants(t, err, context.Canceled)
	if errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v: a cancellation, not a timeout", err)
	}
}

func TestWhichErrorsLast(t *testing.T) {
	for text, lasts := range map[string]bool{
		"NOPERM this user has no permissions":                                 true,
		"ERR Error running script: @user_script: NOPERM":                      true,
		"failed to authenticate: WRONGPASS invalid username":                  true,
		"failed to initialize connection options: NOPERM no permissions":      true,
		"redis: client is closed":                                             true,
		"failed to initialize connection options: LOADING Redis is loading":   false,
		"failed to authenticate: dial tcp 127.0.0.1:1: connection refused":    false,
		"ERR Error running script: @user_script: OOM command not allowed":     false,
		"READONLY You can't write against a read only replica.":               false,
		"redlatch: lock a: ERR: no answer to acquire: context canceled":       false,
		"redlatch: lock WRONG: no answer to acquire: context canceled":        false,
		"dial tcp: lookup ERR.example.org: no such host":                      false,
		"read tcp 127.0.0.1:1->127.0.0.1:2: use of closed network connection": false,
	} {
		if isFinal(errors.New(text)) != lasts {
			t.Errorf("%s: not %v", text, lasts)
		}
	}
}

// go-redis repeats a request whose connection broke. The second copy finds the lock held, and the
// first one, on its way for longer, finds it free: without a release nobody holds it for a TTL.
func TestBusyTryThatWasRepeatedIsGivenUp(t *testing.T) {
	db, a := fresh(t), client(t)
	lease := must(a.Acquire(ctx, mutex(20*time.Second)))
	proxy := must(net.Listen("tcp", "127.0.0.1:0"))
	defer proxy.Close()
	late := make(chan func(), 1) // delivers the first copy
	go func() {
		for {
			near, err := proxy.Accept()
			if err != nil {
				return
			}
			far := must(net.Dial("tcp", addr))
			go io.Copy(near, far)
			go func() {
				defer near.Close()
				for buffer := make([]byte, 4096); ; {
					n, err := near.Read(buffer)
					if err != nil {
						return
					} else if strings.Contains(string(buffer[:n]), "acquire") && len(late) == 0 {
						late <- func() { far.Write(buffer[:n]) }
						return
					}
					far.Write(buffer[:n])
				}
			}()
		}
	}()
	b := open(t, redis.NewClient(&redis.Options{Addr: proxy.Addr().String()}))
	_, err := b.Acquire(ctx, try(mutex(20*time.Second)))
	wants(t, err, ErrBusy)
	b.background.Wait()
	wants(t, lease.Release(), nil)
	calls := scriptCalls(db)
	(<-late)()
	eventually(t, "the first copy is served", func() bool { return scriptCalls(db) > calls })
	if db.Exists(ctx, "lock:x").Val() != 0 {
		t.Error("the attempt that has ended was granted the lock")
	}
}

func TestLateGrantBeginsANewAttempt(t *testing.T) {
	db, c := fresh(t), client(t)
	// Again where a busy machine has used up the TTL of the second grant as well.
	eventually(t, "a valid lease after a late grant", func() bool {
		db.ClientPause(ctx, 80*time.Millisecond) // longer than the TTL, less than the limit of a request
		lease := must(c.Acquire(ctx, mutex(50*time.Millisecond)))
		isValid := lease.IsValid()
		return lease.Release() == nil && isValid
	})
}

func TestUnansweredAcquireIsRepeated(t *testing.T) {
	db, c := fresh(t), client(t)
	db.ClientPause(ctx, 2*time.Second) // the limit of a request is 1.5 s
	lease := must(c.Acquire(ctx, mutex(6*time.Second)))
	wants(t, lease.Release(), nil)
}

func TestNames(t *testing.T) {
	fresh(t)
	c, bare := client(t), must(New(ctx, plain(t), folder, ""))
	defer bare.Close()
	for name, isValid := range map[string]bool{"": false, "a}b": false, "{}a": false, "a{b": true,
		"{a}": true, "{a}b": true, "{a}:fence": false, "x{a}y:waiters": false, "x:fence": true,
		"{a}fence": true, "{a}{}node": false, "a\n": true, strings.Repeat("n", 512): true,
		strings.Repeat("n", 513): false} {
		lease, err := c.Acquire(ctx, Lock{Kind: Mutex, Name: name, NoWait: true})
		if isValid {
			wants(t, lease.Release(), nil)
		}
		if isValid != !errors.Is(err, ErrInvalidLock) {
			t.Errorf("%q: %v", name, err)
		}
	}
	_, err := bare.Acquire(ctx, Lock{Kind: Mutex, Name: "{a}", TTL: time.Second})
	wants(t, err, ErrInvalidLock)
	_, err = c.Acquire(ctx, Lock{Kind: "other", Name: "a", TTL: time.Second})
	wants(t, err, ErrInvalidLock)
}

func TestForeignKeysAreRefusedAndKept(t *testing.T) {
	db, c := fresh(t), client(t)
	db.Set(ctx, "lock:x", "no TTL", 0)
	for _, kind := range []Kind{Mutex, Reentrant, Read, Write} {
		_, err := c.Acquire(ctx, rwlock(kind, "o"))
		wants(t, err, ErrWrongType)
	}
	if value := db.Get(ctx, "lock:x").Val(); value != "no TTL" {
		t.Errorf("the key has %q", value)
	}
	c.background.Wait()
	db.Del(ctx, "lock:x")
	_, err := c.Acquire(ctx, mutex(time.Microsecond)) // 0 ms
	wants(t, err, ErrMalformed)
}

func TestMalformedWordsAreNamedBeforeTheyAreSent(t *testing.T) {
	db, c := fresh(t), client(t)
	calls := scriptCalls(db)
	for _, each := range []struct {
		lock Lock
		is   error
		text string
	}{
		{Lock{Kind: Mutex, Name: "x", TTL: -time.Second}, ErrMalformed, "TTL -1s"},
		{Lock{Kind: Mutex, Name: "x", TTL: time.Microsecond}, ErrMalformed, "TTL 1µs"},
		{Lock{Kind: Mutex, Name: "x", TTL: time.Millisecond}, ErrMalformed, "TTL 1ms"},
		{Lock{Kind: Mutex, Name: "x", TTL: 1e7 * time.Second}, ErrMalformed, "TTL 2777h"},
		{Lock{Kind: Reentrant, Name: "x"}, ErrMalformed, "requires an owner"},
		{Lock{Kind: Reentrant, Name: "x", Owner: "a b"}, ErrMalformed, `owner "a b"`},
		{Lock{Kind: Read, Name: "x", Owner: ":a"}, ErrMalformed, `owner ":a"`},
		{Lock{Kind: Mutex}, ErrInvalidLock, "no name"},
		{Lock{Kind: Mutex, Name: "a}"}, ErrInvalidLock, `"lock:a}"`},
		{Lock{Kind: "mutex/force", Name: "x"}, ErrInvalidLock, `kind "mutex/force"`},
	} {
		_, err := c.Acquire(ctx, each.lock)
		if wants(t, err, each.is); !strings.Contains(fmt.Sprint(err), each.text) {
			t.Errorf("%v does not say %s", err, each.text)
		}
	}
	if n := scriptCalls(db) - calls; n != 0 {
		t.Errorf("%d requests", n)
	}
	wants(t, must(c.Acquire(ctx, Lock{Kind: Mutex, Name: "x", Owner: "unused a"})).Release(), nil)
}

func TestFencedWriteOfAnOldHolderIsRefused(t *testing.T) {
	db, c := fresh(t), client(t)
	old := must(c.Acquire(ctx, mutex(20*time.Second)))
	wants(t, old.Release(), nil)
	lease := must(c.Acquire(ctx, mutex(20*time.Second)))
	write := func(token int64, value any) bool {
		return must(c.WriteFenced(ctx, "{r}:text", "{r}:token", token, value))
	}
	if !write(old.Token, "1") || !write(lease.Token, []byte("2")) || !write(lease.Token, 3) {
		t.Error("a write was refused")
	}
	if write(old.Token, "late") || db.Get(ctx, "{r}:text").Val() != "3" {
		t.Error("a late write was accepted")
	}
	if _, err := c.WriteFenced(ctx, "{r}:text", "{r}:token", 0, "x"); err == nil {
		t.Error("a token of 0 was accepted")
	}
	wants(t, lease.Release(), nil)
}

func TestTTLOfZeroIsTheDefault(t *testing.T) {
	db, c := fresh(t), client(t)
	lease := must(c.Acquire(ctx, mutex(0)))
	if ttl := db.PTTL(ctx, "lock:x").Val(); ttl <= defaultTTL/2 || ttl > defaultTTL {
		t.Errorf("the TTL is %v", ttl)
	}
	wants(t, lease.Release(), nil)
}

func TestUserWithDocumentedRights(t *testing.T) {
	db := fresh(t)
	page := string(must(os.ReadFile("../../README.md")))
	rights := strings.Fields(regexp.MustCompile(`ACL SETUSER locks .*`).FindString(page))
	words := make([]any, len(rights))
	for i, word := range rights {
		words[i] = word
	}
	must(db.Do(ctx, words...).Result())
	defer db.Do(ctx, "ACL", "DELUSER", "locks")
	var clients []*Client
	for range 2 {
		user := redis.NewClient(&redis.Options{Addr: addr, Username: "locks", Password: "secret"})
		defer user.Close()
		clients = append(clients, open(t, user))
	}
	db.ScriptFlush(ctx)
	handOver(t, db, 8, clients...)
	for _, kind := range []Kind{Reentrant, Read, Write} {
		lease := must(clients[0].Acquire(ctx, rwlock(kind, "o")))
		wants(t, lease.Renew(ctx), nil)
		wants(t, lease.Release(), nil)
	}
	for _, c := range clients {
		c.Close()
	}
}

// process is a worker: a client in a process of its own, which a test may kill.
type process struct {
	command *exec.Cmd
	stdin   io.Writer
	stdout  *bufio.Scanner
}

func startWorker(t *testing.T, url string) *process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "worker")
	output, err := exec.Command("go", "build", "-o", path, "./worker").CombinedOutput()
	if err != nil {
		t.Fatalf("%s", output)
	}
	p := &process{command: exec.Command(path)}
	p.stdin = must(p.command.StdinPipe())
	p.stdout = bufio.NewScanner(must(p.command.StdoutPipe()))
	if err := p.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	p.send(fmt.Sprintf(`{"do":"open","url":"redis://%s","topology":"server","prefix":"lock:"}`, url))
	p.wants(t, `{"ok":true}`)
	return p
}

func (p *process) kill() { p.command.Process.Kill(); p.command.Wait() }

func (p *process) send(line string) { fmt.Fprintln(p.stdin, line) }

// wants compares the next answer with a pattern.
func (p *process) wants(t *testing.T, pattern string) {
	t.Helper()
	if p.stdout.Scan(); !regexp.MustCompile("^" + pattern + "$").MatchString(p.stdout.Text()) {
		t.Errorf("answer %s, not %s", p.stdout.Text(), pattern)
	}
}

func TestWorkerAnswersItsCommands(t *testing.T) {
	db := fresh(t)
	p := startWorker(t, addr)
	for _, step := range [][2]string{
		{`{"do":"acquire","kind":"write","name":"x","ttl_ms":20000,"limit_ms":5000,"as":"h"}`,
			`{"ok":true,"token":\d+}`},
		{`{"do":"acquire","kind":"read","name":"x","ttl_ms":20000,"limit_ms":0,"as":"i"}`,
			`{"error":"timed_out","ok":false,"text":"[^"]+"}`},
		{`{"do":"downgrade","as":"h"}`, `{"held":true,"ok":true}`},
		{`{"do":"acquire","kind":"read","name":"x","ttl_ms":20000,"limit_ms":0,"as":"i"}`,
			`{"ok":true,"token":\d+}`},
		{`{"do":"renew","as":"i"}`, `{"held":true,"ok":true}`},
		{`{"do":"is_valid","as":"i"}`, `{"ok":true,"valid":true}`},
		{`{"do":"release","as":"i"}`, `{"held":true,"ok":true}`},
		{`{"do":"release","as":"h"}`, `{"held":true,"ok":true}`},
		{`{"do":"is_valid","as":"i"}`, `{"ok":true,"valid":false}`},
		{`{"do":"count","kind":"mutex","name":"y","key":"n","seconds":0.2}`,
			`{"increments":\d+,"longest_ms":\d+,"ok":true,"tokens_ascending":true}`},
		{`{"do":"acquire","kind":"mutex","name":"a}b","ttl_ms":3000,"limit_ms":0,"as":"j"}`, `{"error":"invalid_name","ok":false,"text":".+"}`},
		{`{"do":"acquire","kind":"mutex","name":"z","ttl_ms":600,"limit_ms":9000,"as":"k"}`,
			`{"ok":true,"token":\d+}`},
		{`{"do":"lost","as":"k","limit_ms":10000,"async":true,"id":7}`, `DEL`},
		{`{"do":"release","as":"k"}`, `{"held":false,"ok":true}`},
		{`{"do":"release","as":"none"}`, `{"error":"failed","ok":false,"text":"[^"]+"}`},
		{`{"do":"fly"}`, `{"error":"unknown","ok":false,"text":"unknown"}`},
		{`not JSON`, `{"error":"unknown","ok":false,"text":"unknown"}`},
		{`{"do":"close"}`, `{"ok":true}`},
	} {
		if p.send(step[0]); step[1] == "DEL" {
			db.Del(ctx, "lock:z")
			step[1] = `{"id":7,"ok":true}`
		}
		p.wants(t, step[1])
	}
	wants(t, p.command.Wait(), nil)
}

func TestKilledHolderIsSucceededAfterTTL(t *testing.T) {
	db, c := fresh(t), client(t)
	p := startWorker(t, addr)
	p.send(`{"do":"acquire","kind":"mutex","name":"x","ttl_ms":6000,"limit_ms":9000,"as":"h"}`)
	p.wants(t, `{"ok":true,"token":\d+}`)
	granted := acquireLater(t, db, c, mutex(20*time.Second))
	p.kill()
	killed := time.Now() // before its TTL is asked for
	left := db.PTTL(ctx, "lock:x").Val()
	lease := <-granted
	if took := time.Since(killed); took < left-50*time.Millisecond || took > left+5*time.Second {
		t.Errorf("granted after %v, with a TTL of %v left", took, left)
	}
	wants(t, lease.Release(), nil)
}

func TestKilledWaiterDelaysOthersForOneClaimAtMost(t *testing.T) {
	db, c := fresh(t), client(t)
	p := startWorker(t, addr)
	lease := must(c.Acquire(ctx, mutex(20*time.Second)))
	p.send(`{"do":"acquire","kind":"mutex","name":"x","ttl_ms":20000,"limit_ms":60000,"as":"h",` +
		`"async":true,"id":1}`)
	eventually(t, "the waiter of the worker is queued", func() bool { return waiting(db, lease.keys[1]) == 1 })
	granted := acquireLater(t, db, c, mutex(20*time.Second))
	p.kill()
	began := time.Now()
	wants(t, lease.Release(), nil)
	lease = <-granted
	if took := time.Since(began); took > 5500*time.Millisecond { // less than two claims
		t.Errorf("granted after %v, more than the claim of 3 s", took)
	}
	wants(t, lease.Release(), nil)
}

// wrapped is a client as an application may wrap it: its type says nothing of a cluster.
type wrapped struct{ redis.UniversalClient }

func TestCluster(t *testing.T) {
	t.Parallel()
	var addrs []string
	for range 3 {
		addrs = append(addrs, ownServer(t, "--cluster-enabled", "yes"))
	}
	for i, address := range addrs {
		node := redis.NewClient(&redis.Options{Addr: address})
		defer node.Close()
		var slots []int
		for slot := i; slot < 16384; slot += 3 {
			slots = append(slots, slot)
		}
		if err := node.ClusterAddSlots(ctx, slots...).Err(); err != nil {
			t.Skip("no cluster: ", err)
		}
		host, port, _ := net.SplitHostPort(addrs[0])
		must(node.ClusterMeet(ctx, host, port).Result())
		eventually(t, "the node has joined", func() bool {
			return i == 0 || strings.Count(node.ClusterNodes(ctx).Val(), "\n") > i
		})
	}
	db := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ReadTimeout: 10 * time.Second})
	defer db.Close()
	eventually(t, "the cluster is complete", func() bool {
		for _, address := range addrs {
			node := redis.NewClient(&redis.Options{Addr: address})
			defer node.Close()
			if info := node.ClusterInfo(ctx).Val(); !strings.Contains(info, "cluster_state:ok") {
				return false
			}
		}
		return db.Ping(ctx).Err() == nil
	})
	a, b := open(t, db), open(t, wrapped{db})
	for _, c := range []*Client{a, b} {
		if !strings.HasSuffix(c.channel, "~") {
			t.Errorf("the channel %s is that of a single server", c.channel)
		}
	}
	var all grants
	for i := range 12 {
		lock := Lock{Kind: Mutex, Name: fmt.Sprint("name", i), TTL: 20 * time.Second}
		lease := must(a.Acquire(ctx, lock))
		granted := acquireLater(t, db, []*Client{a, b}[i%2], lock)
		began := time.Now()
		wants(t, lease.Release(), nil)
		wants(t, (<-granted).Release(), nil)
		all.add(time.Since(began))
	}
	all.wantsNoPolls(t)
	db.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
		nothingLeft(t, node)
		return nil
	})

	// All nodes are silent: go-redis asks them for the slots one after the other, for 10 s each.
	lock := Lock{Kind: Mutex, Name: "silent", TTL: time.Second}
	lease := must(a.Acquire(ctx, lock))
	db.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
		return node.ClientPause(ctx, 20*time.Second).Err()
	})
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, 600*time.Millisecond)
	defer cancel()
	_, err := b.Acquire(limited, lock)
	wants(t, err, context.DeadlineExceeded)
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("a limit of 600 ms took %v", took)
	}
	<-lease.Context().Done()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("a lease of 1 s ended after %v", took)
	}
	wants(t, a.Close(), nil)
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("the end of a lease of 1 s, and Close, took %v", took)
	}
}

func TestSentinel(t *testing.T) {
	t.Parallel()
	master, stop, err := startServer(t.TempDir())
	wants(t, err, nil)
	t.Cleanup(stop)
	host, port, _ := net.SplitHostPort(master)
	replica := ownServer(t, "--replicaof", host, port)
	first := redis.NewClient(&redis.Options{Addr: master})
	defer first.Close()
	eventually(t, "the replica is connected", func() bool {
		return strings.Contains(first.Info(ctx, "replication").Val(), "state=online")
	})
	file := filepath.Join(t.TempDir(), "sentinel.conf")
	text := fmt.Sprintf("sentinel monitor m %s %s 1\nsentinel down-after-milliseconds m 60000\n"+
		"sentinel failover-timeout m 3000\n", host, port)
	os.WriteFile(file, []byte(text), 0o600)
	sentinel := ownServer(t, file, "--sentinel")
	watch := redis.NewClient(&redis.Options{Addr: sentinel})
	defer watch.Close()
	// A machine that stalls for 2 s must not make it refuse to act for 30 s; from 7.0 on.
	_ = watch.Do(ctx, "SENTINEL", "DEBUG", "tilt-trigger", "60000").Err()
	db := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "m",
		SentinelAddrs: []string{sentinel}})
	defer db.Close()
	a, b := open(t, db), open(t, db)
	handOver(t, db, 8, a, b)
	eventually(t, "Sentinel knows the replica", func() bool {
		control := redis.NewSentinelClient(&redis.Options{Addr: sentinel})
		defer control.Close()
		return len(control.Replicas(ctx, "m").Val()) == 1
	})
	// Only now: a machine that stalls must not make it promote the replica of a living master.
	must(watch.Do(ctx, "SENTINEL", "SET", "m", "down-after-milliseconds", 500).Result())
	stop()
	eventually(t, "both clients are subscribed at the new master", func() bool {
		node := redis.NewClient(&redis.Options{Addr: replica})
		defer node.Close()
		counts := node.PubSubNumSub(ctx, a.channel, b.channel).Val()
		return counts[a.channel] == 1 && counts[b.channel] == 1
	})
	handOver(t, db, 8, a, b)
	nothingLeft(t, db)
}

func TestVectors(t *testing.T) {
	for _, file := range must(filepath.Glob("../../vectors/*.jsonl")) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			c := open(t, redis.NewClient(&redis.Options{Addr: ownServer(t), Protocol: 2}))
			for line := range strings.Lines(string(must(os.ReadFile(file)))) {
				bindings{}.runVector(t, c, line)
			}
		})
	}
}

type bindings map[string]string

// runVector follows the steps of lua/vectors/README.md.
func (names bindings) runVector(t *testing.T, c *Client, line string) {
	var vector struct{ Steps, After []json.RawMessage }
	json.Unmarshal([]byte(line), &vector)
	c.db.FlushAll(ctx)
	news := c.db.Subscribe(ctx)
	defer news.Close()
	for _, raw := range append(vector.Steps, vector.After...) {
		text := string(raw)
		for _, part := range regexp.MustCompile(`\$(\w+)([+-]\d+)?`).FindAllStringSubmatch(text, -1) {
			value := names[part[1]]
			if offset, err := strconv.Atoi(part[2]); err == nil {
				value = fmt.Sprint(must(strconv.Atoi(value)) + offset)
			}
			text = strings.Replace(text, part[0], value, 1)
		}
		step := struct {
			Run, Time, Subscribe, Message string
			Keys                          []string
			Args, Command                 []any
			Wait                          time.Duration
			Times                         int
			Answer                        any
		}{Times: 1, Answer: map[string]any{}} // the default: any reply but an error
		json.Unmarshal([]byte(text), &step)
		for range step.Times {
			reply := redis.NewCmd(ctx)
			switch time.Sleep(step.Wait * time.Millisecond); {
			case step.Run != "":
				reply = c.scripts[step.Run].Run(ctx, c.db, step.Keys, step.Args...)
			case step.Command != nil:
				reply = c.db.Do(ctx, step.Command...)
			case step.Time != "":
				names[step.Time] = fmt.Sprint(c.db.Time(ctx).Val().UnixMicro())
			case step.Subscribe != "":
				news.Subscribe(ctx, step.Subscribe)
				must(news.ReceiveTimeout(ctx, 10*time.Second))
			case step.Message != "":
				if message, err := news.ReceiveTimeout(ctx, time.Second); err == nil {
					reply.SetVal(message.(*redis.Message).Payload)
				}
			}
			if !names.equal(step.Answer, cmp.Or(reply.Val(), any(reply.Err()))) {
				t.Fatalf("%v in %s of %.300s", reply, text, line)
			}
		}
	}
}

func (names bindings) equal(want, got any) bool {
	number, isInteger := got.(int64)
	switch want := want.(type) {
	case []any:
		list, isList := got.([]any)
		return isList && slices.EqualFunc(want, list, names.equal)
	case map[string]any:
		_, isError := got.(error)
		names[fmt.Sprint(want["bind"])] = fmt.Sprint(got)
		low, noLow := strconv.ParseFloat(fmt.Sprint(want["min"]), 64)
		high, noHigh := strconv.ParseFloat(fmt.Sprint(want["max"]), 64)
		begin, _ := want["begins"].(string)
		return (isError && got != redis.Nil) == (want["error"] != nil) &&
			strings.HasPrefix(fmt.Sprint(got), begin) &&
			(noLow != nil || isInteger && low <= float64(number)) &&
			(noHigh != nil || isInteger && float64(number) <= high)
	}
	return want == got || want == nil && got == redis.Nil ||
		isInteger && (want == float64(number) || want == fmt.Sprint(number))
}
